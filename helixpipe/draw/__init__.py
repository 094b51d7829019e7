"""Timelines as text, pictures, pages and traces."""
