"""Writes a profile as YAML that a person can review: each figure with a comment that says where it is from."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import LiteralScalarString

from commplan.language.profiles import Profile

Comments = Mapping[tuple[str | int, ...], str]
"""Keys from the top of the profile -> what to say of what is there; of a figure beside it, of a part above it."""

DIGITS: Final = 4
"""Significant ones of a figure."""

_WIDTH: Final = 130
_INDENT: Final = 2


class _Figure(float):
    """A number that is written in few digits."""


class _Representer(RoundTripRepresenter):
    """Knows figures."""

    def represent_figure(self, figure: _Figure) -> ScalarNode:
        """As 1.235e+09, and as 2.0."""
        text = f"{figure:.{DIGITS}g}"
        text += ".0" if text.lstrip("-").isdecimal() else ""
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:float", text)
        return node


_Representer.add_representer(_Figure, _Representer.represent_figure)


def profile_text(profile: Profile, comments: Comments | None = None) -> str:
    """YAML that `parse_profile` reads; figures are rounded to 4 digits. `profile.source` may have several lines."""
    data = profile.model_dump(mode="json", exclude_defaults=True)
    known: dict[str, Any] = {"version": profile.version, "name": profile.name, "source": profile.source, **data}
    known["fsdp2_gathers"] = profile.fsdp2_gathers
    if "\n" in profile.source:
        known["source"] = LiteralScalarString(profile.source.rstrip("\n") + "\n")
    yaml = YAML(typ="rt", pure=True)
    yaml.Representer = _Representer
    yaml.width = _WIDTH
    yaml.indent(mapping=_INDENT, sequence=2 * _INDENT, offset=_INDENT)
    out = io.StringIO()
    yaml.dump(_laid_out(known, (), comments or {}), out)
    return out.getvalue()


def _laid_out(value: Any, at: tuple[str | int, ...], comments: Comments) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, at, comments)
    if isinstance(value, list):
        laid_out = CommentedSeq(_laid_out(item, (*at, place), comments) for place, item in enumerate(value))
        if all(not isinstance(item, list) for item in value):
            laid_out.fa.set_flow_style()
        for place in range(len(value)):
            if (comment := comments.get((*at, place))) is not None:
                laid_out.yaml_add_eol_comment(comment, place, column=0)
        return laid_out
    return _Figure(value) if isinstance(value, float) else value


def _mapping(value: Mapping[str, Any], at: tuple[str | int, ...], comments: Comments) -> CommentedMap:
    laid_out = CommentedMap()
    for key, item in value.items():
        laid_out[key] = _laid_out(item, (*at, key), comments)
        comment = comments.get((*at, key))
        if comment is None:
            continue
        if isinstance(item, Mapping | list) or "\n" in comment:
            laid_out.yaml_set_comment_before_after_key(key, before=comment, indent=_INDENT * len(at))
        else:
            laid_out.yaml_add_eol_comment(comment, key, column=0)
    return laid_out
