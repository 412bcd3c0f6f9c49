"""Places where a long name may be broken, so that a table of names fits its page."""

import re

_LONG_NAME = re.compile(r'(?<=<span class="pre">)[^<>&]{18,}(?=</span>)')


def breakable(html):
    """The page with a break allowed after each underscore, dot and colon of the long names in it."""
    return _LONG_NAME.sub(lambda name: re.sub(r"(?<=[_.:])(?=\w)", "<wbr>", name[0]), html)


def _process(app, pagename, templatename, context, doctree):
    if "body" in context:
        context["body"] = breakable(context["body"])


def setup(app):
    app.connect("html-page-context", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
