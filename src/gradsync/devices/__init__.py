"""Accelerators as host threads see them: streams, events and the current device."""
