"""The actor: steps environments, streams observations, holds no model. Never imports torch."""
