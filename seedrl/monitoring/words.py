"""Numbers as people read them."""


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
