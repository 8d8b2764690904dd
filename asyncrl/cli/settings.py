"""`asyncrl settings [WORD ...]`: lists settings from the schema. `--markdown` prints the page docs/settings.md."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from asyncrl.checks.hints import nearest_key
from asyncrl.checks.rules.settings import allowed
from asyncrl.config import choice_values, chosen_by_default, config_dir, config_groups, config_keys, default_settings
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.sft import rules
from asyncrl.sft.settings import SftConfig

REQUIRED = "???"
HEAD = """# Settings

Made by `asyncrl settings --markdown > docs/settings.md` from the schema: change it, not this page. On the command
line `asyncrl settings WORD` shows those whose key or meaning has the word.

A setting is given as `key=value`, a group of them as `group=name` (the files in `configs/`), or both in a file of your
own: `asyncrl local my.yaml key=value`. `asyncrl local runs/NAME/config.yaml` repeats a run. Later settings win.
"""

SFT_HEAD = """# Settings of `asyncrl sft`

Made by `asyncrl settings --sft --markdown > docs/sft_settings.md` from the schema: change it, not this page. On the
command line `asyncrl settings --sft WORD` shows those whose key or meaning has the word. [What they are for](sft.md).
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    key: str
    kind: str
    """Python type: `int`, `list[str]`."""
    default: str
    allowed: str
    """Allowed values in words; empty if no rule checks the value by itself."""
    meaning: str
    changed_by: tuple[str, ...]
    """Files of `configs/` that set another value, by group and value: `experiment=grpo, lora (30.0)`."""

    @property
    def room(self) -> str:
        return self.key.partition(".")[0] if "." in self.key else ""


def catalogue(kind: type = Config) -> list[Setting]:
    """Return all settings in the order of the schema; `SftConfig` has those of `asyncrl sft`."""
    whole = kind is Config
    defaults, meanings, kinds = default_settings(kind), _meanings(kind), _kinds(kind)
    ranges, changes = (allowed(), _changes(defaults)) if whole else (rules.allowed(), {})
    return [
        Setting(
            key=key,
            kind=kinds[key],
            default=_shown(key, defaults[key]),
            allowed=ranges.get(key, ""),
            meaning=meanings[key],
            changed_by=tuple(changes.get(key, ())),
        )
        for key in config_keys(kind)
    ]


def _changes(defaults: dict[str, Any]) -> dict[str, list[str]]:
    files: dict[str, dict[tuple[str, str], list[str]]] = {}
    default_choices = chosen_by_default()
    for group in config_groups():
        for file in sorted((config_dir() / group).glob("*.yaml")):
            if default_choices.get(group) == file.stem:
                continue
            for key, value in choice_values(group, file.stem).items():
                if key in defaults and value != defaults[key]:
                    files.setdefault(key, {}).setdefault((group, _shown(key, value)), []).append(file.stem)
    found = {
        key: [f"{group}={', '.join(names)} ({value})" for (group, value), names in of_key.items()]
        for key, of_key in files.items()
    }
    # Every file of these groups sets these keys to its own value.
    return found | {"loss.preset": ["loss=NAME"], "run.name": ["experiment=NAME"]}


def _shown(key: str, value: Any) -> str:
    if value == REQUIRED:
        return "required"
    if value is None:
        return "the preset's" if key.startswith("loss.") else "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "empty"


def _kinds(kind: type, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and is_dataclass(hint):
            found |= _kinds(hint, f"{prefix}{name}.")
        else:
            said = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else str(hint)
            found[prefix + name] = said.replace("typing.", "").replace(" | None", "")
    return found


def _meanings(kind: type, prefix: str = "") -> dict[str, str]:
    """Return the text under each field of the dataclass, its base classes, and nested dataclasses. A field that only
    gets another default keeps the text of its base class."""
    texts = [text for each in reversed(kind.__mro__) if is_dataclass(each) for text in _under(each).items()]
    under = dict(texts) | {name: text for name, text in texts if text}
    found: dict[str, str] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        inner = hints[item.name]
        if isinstance(inner, type) and is_dataclass(inner):
            found |= _meanings(inner, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = under[item.name]
    return found


def _under(kind: type) -> dict[str, str]:
    """Return the text under each field that is defined in this class itself."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    under: dict[str, str] = {}
    for field, after in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            under[field.target.id] = " ".join(str(text).split())
    return under


def matching(words: Sequence[str], kind: type = Config) -> list[Setting]:
    """Return the settings whose key, meaning or choices contain all `words`, ignoring case.

    Raises:
        ConfigError: there is none.
    """
    wanted = [word.lower() for word in words]
    found = [
        setting
        for setting in catalogue(kind)
        if all(word in f"{setting.key} {setting.meaning} {setting.changed_by}".lower() for word in wanted)
    ]
    if not found:
        meant = nearest_key(words[0], config_keys(kind))
        raise ConfigError(
            f"no setting has {' and '.join(repr(word) for word in words)} in its key or meaning."
            + (f" Did you mean `{meant}`?" if meant else " `asyncrl settings` lists all of them")
        )
    return found


def as_text(settings: Sequence[Setting], width: int) -> Iterator[str]:
    for setting in settings:
        facts = [setting.kind, f"default {setting.default}" if setting.default != "required" else "required"]
        yield f"{setting.key}  ({', '.join(facts)}{'; ' + setting.allowed if setting.allowed else ''})"
        for text in (setting.meaning, "changed by " + "; ".join(setting.changed_by) if setting.changed_by else ""):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def as_markdown(settings: Sequence[Setting], head: str = HEAD) -> str:
    parts = [head]
    for room in dict.fromkeys(setting.room for setting in settings):
        parts.append(f"\n## {room or 'The run as a whole'}\n\n")
        parts.append("| setting | type | default | may be | meaning | changed by |\n|---|---|---|---|---|---|\n")
        for setting in settings:
            if setting.room == room:
                cells = (setting.kind, setting.default, setting.allowed, setting.meaning, "; ".join(setting.changed_by))
                row = " | ".join(cell.replace("|", "\\|") for cell in cells)
                parts.append(f"| `{setting.key}` | {row} |\n")
    return "".join(parts)


def main(words: Sequence[str], *, markdown: bool, sft: bool = False) -> int:
    found = matching(words, SftConfig if sft else Config)
    if markdown:
        sys.stdout.write(as_markdown(found, SFT_HEAD if sft else HEAD))
    else:
        print("\n".join(as_text(found, min(shutil.get_terminal_size().columns, 120))))
    return 0
