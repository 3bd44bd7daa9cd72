"""The lab says what is missing, and how to get it, where it cannot be built; needs no privileges."""

from __future__ import annotations

import sys

import pytest

from gradsync_lab.cluster import Lab, LabUnavailableError, Scenario


def test_missing_pyroute2_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(LabUnavailableError, match="needs pyroute2: pip install pyroute2"):
        Lab(Scenario(nodes=2)).__enter__()


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabUnavailableError, match="needs Linux's network namespaces, this is darwin"):
        Lab(Scenario(nodes=2)).__enter__()
