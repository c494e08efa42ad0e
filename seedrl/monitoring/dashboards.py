"""Makes the Grafana dashboard and the Prometheus console from the panels. Run as a program, it writes both files.

Knows the formats of both; the content is in panels.py, and the layout of the console in console.html.
"""

import html
import json
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

from seedrl.monitoring.panels import PANELS, ROWS, TILES, Panel, Section, Tile, Unit

DIRECTORY = Path("conf/observability")
GRAFANA, CONSOLE = "grafana/seedrl.json", "consoles/seedrl.html"
METRIC = re.compile(r"\b((?:seedrl|process)_[a-z0-9_]+)(\{)?")
RESTARTED = "changes(process_start_time_seconds[$window]) > 0"

SCHEMA_VERSION = 42
GRAFANA_SCOPE = 'job="$job",instance="$instance"'
GRAFANA_UNITS = {
    Unit.number: "short",
    Unit.per_second: "short",
    Unit.per_minute: "short",
    Unit.seconds: "s",
    Unit.share: "percentunit",
    Unit.bytes: "bytes",
    Unit.bytes_per_second: "binBps",
    Unit.word: "percentunit",
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_WIDTH, PANEL_WIDTH, PANEL_HEIGHT, TILE_HEIGHT = 24, 8, 8, 4


def scoped(query: str, scope: str) -> str:
    """Return the query for one learner only. Rates leave out the moments around a restart.

    A resumed run continues to count where its checkpoint was: less than before, yet far from zero. Prometheus takes
    that for a counter that was reset, and would show millions of steps within a second.
    """
    if "[$window]" in query:
        query = f"({query}) unless on (job, instance) ({RESTARTED})"
    return METRIC.sub(lambda found: f"{found[1]}{{{scope}{',' if found[2] else '}'}", query)


def grafana() -> str:
    """Return the dashboard as Grafana imports it."""
    variables = [
        _variable("datasource", "Data source", type="datasource", query="prometheus"),
        _query_variable("job", "Job", "label_values(seedrl_ready, job)"),
        _query_variable("instance", "Learner", 'label_values(seedrl_ready{job="$job"}, instance)'),
    ]
    dashboard = {
        "uid": "seedrl",
        "title": "seedrl",
        "description": "Is it learning, how fast, what is the bottleneck, which actors are slow, how old is the data?",
        "tags": ["seedrl", "reinforcement-learning"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": [_restarts()]},
        "panels": _grafana_panels(),
    }
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def _variable(name: str, label: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "hide": 0, "includeAll": False, "multi": False, "refresh": 1, **more}


def _query_variable(name: str, label: str, query: str) -> dict[str, Any]:
    target = {"query": query, "refId": name}
    return _variable(name, label, type="query", datasource=SOURCE, definition=query, query=target, refresh=2, sort=1)


def _restarts() -> dict[str, Any]:
    return {
        "name": "Restarts of the learner",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": scoped("changes(process_start_time_seconds[$__rate_interval]) > 0", GRAFANA_SCOPE),
        "titleFormat": "the learner was started again",
        "step": "10s",
    }


def _grafana_panels() -> list[dict[str, Any]]:
    """Return the tiles first, then row after row from left to right."""
    numbers = count(1)
    width = GRID_WIDTH // len(TILES)
    made = [_stat(tile, next(numbers), n * width) for n, tile in enumerate(TILES)]
    top = TILE_HEIGHT
    for row in ROWS:
        made.append(_row(row, next(numbers), top))
        own = [panel for panel in PANELS if panel.row is row]
        for n, panel in enumerate(own):
            line, column = divmod(n, GRID_WIDTH // PANEL_WIDTH)
            made.append(_curves(panel, next(numbers), column * PANEL_WIDTH, top + 1 + line * PANEL_HEIGHT))
        top = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in made)
    return made


def _row(row: Section, number: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1}
    title = f"{row.title}: {row.question}"
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _stat(tile: Tile, number: int, left: int) -> dict[str, Any]:
    colour = {"mode": "thresholds" if tile.bad is not None else "fixed", "fixedColor": "text"}
    defaults = {"unit": GRAFANA_UNITS[tile.unit], "color": colour, "thresholds": _thresholds(tile)}
    word = tile.unit is Unit.word
    return {
        "id": number,
        "type": "stat",
        "title": tile.title,
        "description": tile.description,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": 0, "w": GRID_WIDTH // len(TILES), "h": TILE_HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "none" if word else "area",
            "textMode": "value_and_name" if word else "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        "targets": [_target(tile.query, "{what}" if word else tile.title, 0) | {"instant": word, "range": not word}],
    }


def _thresholds(tile: Tile) -> dict[str, Any]:
    """Return the thresholds in rising order, the first without a value, as Grafana expects them."""
    steps: list[dict[str, Any]] = [{"color": "red" if tile.low else "green", "value": None}]
    if tile.warn is not None and tile.bad is not None:
        low, high = sorted((tile.warn, tile.bad))
        steps += [{"color": "yellow", "value": low}, {"color": "green" if tile.low else "red", "value": high}]
    return {"mode": "absolute", "steps": steps}


def _curves(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    drawing = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "axisLabel": panel.unit.value if panel.unit in (Unit.per_second, Unit.per_minute) else "",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    defaults: dict[str, Any] = {"unit": GRAFANA_UNITS[panel.unit], "custom": drawing}
    defaults |= {key: value for key, value in (("min", panel.min), ("max", panel.max)) if value is not None}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(query, legend, n) for n, (query, legend) in enumerate(panel.queries)],
    }


def _target(query: str, legend: str, number: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": scoped(query, GRAFANA_SCOPE).replace("$window", "$__rate_interval"),
        "legendFormat": re.sub(r"\{(\w+)\}", r"{{\1}}", legend),
        "range": True,
    }


def console() -> str:
    """Return the template as Prometheus serves it from --web.console.templates."""
    text = Path(__file__).with_name("console.html").read_text()
    tiles = "\n".join(_tile_markup(tile, number) for number, tile in enumerate(TILES))
    rows = [
        {
            "title": row.title,
            "question": row.question,
            "panels": [_panel_data(panel) for panel in PANELS if panel.row is row],
        }
        for row in ROWS
    ]
    text = text.replace("@TILES@", tiles).replace("@ROWS@", _script_data(rows))
    return text.replace("@TILE_DATA@", _script_data([_tile_data(tile) for tile in TILES]))


def _tile_markup(tile: Tile, number: int) -> str:
    """Return the markup of a tile. Prometheus fills in the number; the script updates it."""
    query = scoped(tile.query, "job=%[1]q,instance=%[2]q").replace("$window", "1m")
    shown = (
        '{{ . | first | label "what" }}'
        if tile.unit is Unit.word
        else f'{{{{ template "{tile.unit.value}" (. | first | value) }}}}'
    )
    value = f"{{{{ with query (printf `{query}` $job $instance) }}}}{shown}{{{{ else }}}}–{{{{ end }}}}"
    title, description = html.escape(tile.title), html.escape(tile.description)
    return f'<div class="tile" id="tile-{number}" title="{description}"><h2>{title}</h2><b>{value}</b></div>'


def _tile_data(tile: Tile) -> dict[str, Any]:
    limits = {"warn": tile.warn, "bad": tile.bad, "low": tile.low}
    return {"query": scoped(tile.query, "$scope"), "unit": tile.unit.value, **limits}


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "description": panel.description,
        "unit": panel.unit.value,
        "queries": [(scoped(query, "$scope"), legend) for query, legend in panel.queries],
        "stacked": panel.stacked,
        "min": panel.min,
        "max": panel.max,
    }


def _script_data(data: list[dict[str, Any]]) -> str:
    """Return JSON that is safe within a script and within a template: no tag and no action can begin in it."""
    text = json.dumps(data, indent=1, ensure_ascii=False).replace("<", "\\u003c")
    assert "{{" not in text
    return text


def write(directory: Path) -> None:
    for name, text in ((GRAFANA, grafana()), (CONSOLE, console())):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
