"""Generates docs/metrics.md from the declarations: `python -m seedrl.monitoring.reference > docs/metrics.md`."""

from seedrl.metrics import (
    MOST_REPORTED,
    ActorMetrics,
    Declaration,
    Kind,
    LearnerState,
    LearningMetrics,
    ServingMetrics,
    declared,
)

TITLES = {
    ServingMetrics: "Serving",
    LearningMetrics: "Learning",
    LearnerState: "State of the learner",
    ActorMetrics: "One actor, at its own endpoint",
}
HEAD = """# Metrics

Generated from `seedrl/metrics.py` by `make reference`; do not edit.

A learner serves these at `http://127.0.0.1:9464/metrics` (`metrics=HOST:PORT`), together with what the system knows of
its process (`process_*`). An actor serves its own only on request (`seedrl actor … metrics=auto`): what actors measure
reaches the learner through the stream. Counters continue after a resume. Labels have the values given here and no
others, except for the values that the algorithm reports, which are bounded; so the number of series does not grow with
actors or environments.
"""


def reference() -> str:
    parts = [HEAD]
    for group, title in TITLES.items():
        parts.append(f"\n## {title}\n\n{str(group.__doc__).splitlines()[0]}\n\n")
        parts.append("| metric | kind | meaning |\n|---|---|---|\n")
        parts += [_line(name, declaration) for name, declaration in declared(group)]
    return "".join(parts)


def _line(name: str, declaration: Declaration) -> str:
    suffix = "_total" if declaration.kind is Kind.counter else ""
    label = f"{{{declaration.label}}}" if declaration.label else ""
    details = ""
    if declaration.label and not declaration.values:
        details = f". {declaration.label.capitalize()}: at most {MOST_REPORTED} names, decided by the algorithm"
    elif declaration.values:
        details = f". {declaration.label.capitalize()}: {', '.join(declaration.values)}"
    elif declaration.buckets:
        details = f". Buckets: {', '.join(f'{bound:g}' for bound in declaration.buckets)}"
    return f"| `seedrl_{name}{suffix}{label}` | {declaration.kind.value} | {declaration.meaning}{details} |\n"


if __name__ == "__main__":
    print(reference(), end="")
