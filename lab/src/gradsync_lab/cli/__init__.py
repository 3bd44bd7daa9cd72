"""Commands of the lab, as `gradsync` finds them."""
