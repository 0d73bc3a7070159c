"""Random schedules as text: most are nearly right, some are right."""

from __future__ import annotations

from hypothesis import strategies as st

LANES = ("", "", "", "a", "own", "replicate", "shard")
KINDS = ("RS", "AR", "apply")
BEFORE = {"RS": "compute", "AR": "RS", "apply": "AR"}


def index(offset: int) -> str:
    return "n" if offset == 0 else f"<n{offset:+d}>"


def wire_attributes(draw: st.DrawFn) -> list[str]:
    """How a collective is cut, fused and cast."""
    sizes = [["chunks: 2"], ["chunks: 3"], ["fuse: {modules: 2}"], ["fuse: {modules: 3, tail: 1}"]]
    dtypes = [["dtype: bf16"], ["dtype: fp32"]]
    return [*draw(st.sampled_from([[]] * 5 + sizes)), *draw(st.sampled_from([[]] * 8 + dtypes))]


@st.composite
def schedules(draw: st.DrawFn, *, fused: bool = True, gathers: bool = True) -> str:
    """A schedule with each op once, at random places, and a few random waits; its YAML."""
    offsets = st.sampled_from([-1, -1, -2, -2, -3, 0])
    sections: dict[str, list[str]] = {"pre_backward": [], "post_backward": [], "root": []}
    base = 0
    families = draw(st.sampled_from([list(KINDS)] * 12 + [["RS", "AR"], ["RS", "apply"], ["AR", "apply"], [*KINDS, "AR"]]))
    skipped = draw(st.sampled_from([()] * 8 + [("AR",), ("AR",), ("RS", "AR"), ("RS",)])) if fused else ()
    for family in families:
        section = draw(st.sampled_from(["post_backward"] * 6 + ["pre_backward"] + ["root"] * (family != "RS")))
        if sections["root"] and draw(st.integers(0, 7)):
            section = "root"
        base = max(-3, min(0, base + draw(st.sampled_from([0] * 4 + [-1] * 3 + [-2, 1]))))
        offset = 0 if section == "root" else base - (section == "pre_backward")
        after = [f"{BEFORE[family]}_{index(offset)}"] if draw(st.integers(0, 9)) else []
        if draw(st.integers(0, 5)) == 0:
            other = draw(st.sampled_from(["RS", "AR", "apply", "compute"]))
            after.append(
                f"{other}_{'n' if section == 'root' else index(offset + draw(st.sampled_from([0, -1, -1, -2, -2, 1])))}"
            )
        if draw(st.integers(0, 7)) == 0 and section == "root":
            after.append(f"{draw(st.sampled_from(KINDS))}_*")
        attributes = [f"after: [{', '.join(dict.fromkeys(after))}]"] if after else []
        lane = draw(st.sampled_from(LANES))
        if lane:
            attributes.append(f"lane: {lane}")
        if fused and family != "apply":
            attributes += wire_attributes(draw)
        attributes += ["when: last_backward"] * (family in skipped)
        sections[section].append(f"{family}_{index(offset)}: {{{', '.join(attributes)}}}")
    if gathers and draw(st.integers(0, 3)) == 0:
        offset = draw(st.integers(0, 2))
        wait = draw(st.sampled_from(["wait: AG_n", "wait: AG_n", "wait: AG_<n+1>", "wait: AG_<n-1>"]))
        sections["pre_backward"] += draw(st.permutations([f"AG_{index(offset)}", wait]))
    for _ in range(draw(st.integers(0, 3))):
        section = draw(st.sampled_from(["post_backward", "post_backward", "pre_backward", "root"]))
        offset = 0 if section == "root" else draw(offsets)
        sections[section].append(f"wait: {draw(st.sampled_from(KINDS))}_{index(offset)}")
    if draw(st.integers(0, 11)) == 0:
        section = draw(st.sampled_from(["post_backward", "root", "root", "root"]))
        sections[section].append(f"wait: {draw(st.sampled_from(KINDS))}_*")
    text = "version: 1\nname: random\nlanes: {a: {}, own: {communicator: own}}\n"
    for section, lines in sections.items():
        if lines:
            shuffled = draw(st.permutations(lines)) if draw(st.integers(0, 3)) == 0 else lines
            text += f"{section}:\n" + "".join(f"  - {line}\n" for line in shuffled)
    return text
