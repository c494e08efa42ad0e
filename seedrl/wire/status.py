"""Status ⇄ the StatusResponse message. Knows nothing of how a status is found or shown."""

from dataclasses import asdict, fields

from seedrl.status import ActorStatus, Learning, Mood, Status, Verdict
from seedrl.v1 import inference_pb2 as pb


def serialize_status(status: Status) -> bytes:
    message = pb.StatusResponse(
        state=status.state,
        version=status.version,
        env_id=status.env,
        device=status.device,
        run_dir=status.run_dir,
        address=status.address,
        metrics_address=status.metrics_address,
        goal_env_steps=status.goal_env_steps,
        goal_return=status.goal_return,
        row=status.row,
        verdict=pb.Verdict(**asdict(status.verdict)),
        learning=pb.Learning(**asdict(status.learning)),
        trouble=status.trouble,
        actors=[pb.ActorStatus(**asdict(actor)) for actor in status.actors],
        rank=status.rank,
        ranks=status.ranks,
        node=status.node,
        algorithm=status.algorithm,
    )
    return message.SerializeToString()


def parse_status(data: bytes) -> Status:
    status = pb.StatusResponse.FromString(data)
    return Status(
        state=status.state,
        version=status.version,
        env=status.env_id,
        device=status.device,
        run_dir=status.run_dir,
        address=status.address,
        metrics_address=status.metrics_address,
        goal_env_steps=status.goal_env_steps,
        goal_return=status.goal_return if status.HasField("goal_return") else None,
        row=dict(status.row),
        verdict=Verdict(status.verdict.bottleneck, status.verdict.evidence, status.verdict.change),
        learning=_learning(status.learning),
        trouble=dict(status.trouble),
        actors=[
            ActorStatus(**{each.name: getattr(actor, each.name) for each in fields(ActorStatus)})
            for actor in status.actors
        ],
        rank=status.rank,
        ranks=status.ranks,
        node=status.node,
        algorithm=status.algorithm,
    )


def _learning(message: pb.Learning) -> Learning:
    """Return the verdict; a learner of an older version sends none."""
    mood = Mood(message.mood) if message.mood in list(Mood) else Mood.open
    return Learning(message.verdict or "early", message.evidence, message.change, mood)
