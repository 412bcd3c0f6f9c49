"""Docstrings as they are written (Google sections, `code`, $formulas$, indented code), made into reST for Sphinx."""

import itertools
import re

import dropbayes

# Where each public name is described, for `name` in a docstring to lead there.
PLACES = {name: f"dropbayes.{module}.{name}" for module, names in dropbayes._HOME.items() for name in names}

_MARKUP = re.compile(
    r"(?P<indent>^ *)?(?P<display>\$\$.+?\$\$)"
    r"|(?P<inline>\$[^$]+\$)"
    r"|(?P<done>:[a-z:]+:`[^`]+`|``.+?``)"
    r"|`(?P<code>[^`\n]+)`"
    r"|(?P<citation>\[GG16[^\]]*\])",
    re.DOTALL | re.MULTILINE,
)


def converted(lines, *, here=""):
    """The lines of a docstring in reST; `here` is the full name of what they describe, which links not to itself."""

    def rest(found):
        if found["display"]:
            indent = found["indent"] or ""
            return f"\n{indent}.. math:: {_one_line(found['display'].strip('$'))}\n"
        if found["inline"]:
            return f":math:`{_one_line(found['inline'][1:-1])}`"
        if found["citation"]:
            return f":doc:`{_one_line(found['citation'])} </theory>`"
        if found["code"]:
            place = PLACES.get(found["code"].removeprefix("dropbayes."))
            linked = place not in (None, here) and not here.startswith("dropbayes.app.cli")  # there, names are commands
            return f":py:obj:`{found['code']} <{place}>`" if linked else f"``{found['code']}``"
        return found[0]

    runs = itertools.groupby(_marked(_without_tables(lines)), key=lambda pair: pair[0])
    texts = [(verbatim, "\n".join(line for _, line in run)) for verbatim, run in runs]
    return "\n".join(text if verbatim else _MARKUP.sub(rest, text) for verbatim, text in texts).split("\n")


def _without_tables(lines):
    """The lines with Markdown tables as list-tables."""
    for is_table, run in itertools.groupby(lines, key=lambda line: line.startswith("|")):
        if not is_table:
            yield from run
            continue
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in run]
        yield from (".. list-table::", "   :header-rows: 1", "")
        for row in (rows[0], *rows[2:]):
            yield from (f"   {'* ' if place == 0 else '  '}- {cell}" for place, cell in enumerate(row))


def _one_line(text):
    return " ".join(text.split())


def _marked(lines):
    """Each line with whether it is code: a doctest and its output, or what stands indented after 'text:'."""
    lines = list(lines)
    in_doctest, code_indent, previous = False, None, ""
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        in_doctest = bool(line.strip()) and (in_doctest or line.lstrip().startswith(">>>"))
        if code_indent is not None and line.strip() and indent < code_indent:
            code_indent = None
        announced = previous.endswith(":") and not previous.startswith(" ")  # the titles of sections have no empty line
        if line.strip() == "" and announced and lines[place + 1 : place + 2] and lines[place + 1].startswith("    "):
            code_indent = 4
            yield False, "\n::"
        previous = line
        yield in_doctest or (code_indent is not None and bool(line.strip())), line


def _process(app, what, name, obj, options, lines):
    lines[:] = converted(list(lines), here=name)
    if what in ("attribute", "data", "property"):
        lines[:0] = [
            "..",
            "",
        ]  # an empty comment: else napoleon takes what stands before a colon for a type


def _skip(app, what, name, obj, skip, options):
    """Leaves out what scikit-learn gives to every estimator, and what a class lists under Attributes itself."""
    learned = isinstance(obj, property) and name.endswith("_")  # scikit-learn's mark of what `fit` has set
    return True if learned or re.fullmatch(r"set_\w+_request", name) else None


def setup(app):
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _process, priority=400)  # before napoleon reads the sections
    return {"parallel_read_safe": True, "parallel_write_safe": True}
