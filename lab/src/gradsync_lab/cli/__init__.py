"""The lab's commands, which `gradsync` finds by entry points."""
