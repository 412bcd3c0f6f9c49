"""The interactive page: draw points, watch what a dropout network does not know.

One HTML file without a server or a network connection: its program is put together from the modules in `web/`, its
digit reader comes from `experiments.digits`. `dropbayes page` opens it.
"""

from __future__ import annotations

from dropbayes.app.page.assembly import page_html
from dropbayes.app.page.server import PageServer

__all__ = ["PageServer", "page_html"]
