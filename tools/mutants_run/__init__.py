"""Mutants of schedules and plans, an oracle that tells which of them are wrong, and what the checker makes of them.

The oracle (`world`, `values`, `reading`, `layout`, `steps`, `run`) shares no code with commplan: it reads the plain data of
a YAML or JSON file, and knows the language from its description alone.
"""
