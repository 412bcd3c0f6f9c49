"""Models behind a port: the Open Inference Protocol, version 2, over HTTP (extra `serve`)."""

from dropbayes.runtime.validation import needed_for

with needed_for("a server", extra="serve"):
    from dropbayes.app.serving.served import Settings
    from dropbayes.app.serving.server import serve

__all__ = ["Settings", "serve"]
