"""The documentation site is built with strict links, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT

pytestmark = pytest.mark.long

LOADED = re.compile(r"""<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=["']([^"']+)["']""")
STYLES = re.compile(r"url\(([^)]+)\)|@import\s+([^;]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_every_document_and_the_generated_pages(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    generated = [f"reference/{name}.html" for name in ("settings", "protocol", "python-api", "exit-codes")]
    others = ["architecture.html", "changelog.html", "contributing.html", "bench/index.html", "bench/RESULTS.html"]
    assert [str(path) for path in (*documents, *generated, *others) if not (site / path).is_file()] == []


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: LOADED.findall(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 40
    for path, targets in pages.items():
        assert targets
        assert [target for target in targets if re.match(r"(https?:)?//", target)] == [], path
    for style in site.rglob("*.css"):
        loaded = ["".join(found).strip("\"' ") for found in STYLES.findall(style.read_text())]
        assert [target for target in loaded if re.match(r"(https?:)?//", target)] == [], style


def test_pictures_of_the_site_are_there(site: Path) -> None:
    for path in site.rglob("*.html"):
        for target in re.findall(r'<img\b[^>]*?\bsrc="([^"]+)"', path.read_text()):
            assert (path.parent / target).is_file(), f"{path.relative_to(site)}: {target}"
