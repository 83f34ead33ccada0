"""docs/configuration.md is what the schema says."""

from pathlib import Path

from pydantic import BaseModel

from epd.config import DeploymentConfig, WorkerConfig
from epd.config.reference import render

ROOT = Path(__file__).parents[2]


def leaves(kind: type[BaseModel]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, field in kind.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found += leaves(section)
        else:
            found.append((name, field.description))
    return found


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render(), "run: python -m epd.config.reference > docs/configuration.md"


def test_every_field_is_described_and_on_the_page() -> None:
    page = render()
    fields = leaves(DeploymentConfig) + leaves(WorkerConfig)
    assert len(fields) > 60
    for name, description in fields:
        assert description, f"{name} has no docstring"
        assert description in page
        assert f"{name}` |" in page
