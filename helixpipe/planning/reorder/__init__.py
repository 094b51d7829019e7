"""A search for better orders of a program's ops: see docs/schedule_search.md."""
