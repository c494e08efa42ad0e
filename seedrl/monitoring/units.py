"""Numbers as people read them: durations and sizes. Knows nothing of what they measure."""


def duration(seconds: float) -> str:
    """Format as h:mm:ss, or as m:ss below an hour."""
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
