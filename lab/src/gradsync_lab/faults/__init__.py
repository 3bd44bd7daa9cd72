"""Faults in small jobs: drawn, injected, and judged by what each surviving rank says and does."""
