"""The interactive page as a file of the built documentation, `live.html`, beside the pages that link to it."""

import pathlib


def write(app, exception):
    if exception is None and app.builder.format == "html":
        from dropbayes.app.page import page_html

        (pathlib.Path(app.outdir) / "live.html").write_text(page_html(), encoding="utf-8")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
