"""An experiment end to end at its smallest size."""

import json

from experiments.reproduction import reproduce


def tiny(name, module, tmp_path):
    findings = reproduce(name, settings=module.Settings.tiny(), out=tmp_path, device="cpu")
    folder = tmp_path / name
    report = json.loads((folder / "results.json").read_text())
    assert report["metrics"]
    assert findings.title in (folder / "page.md").read_text()
    for figure in findings.figures:
        assert (folder / f"{figure}.png").stat().st_size > 5000
    return report["metrics"]
