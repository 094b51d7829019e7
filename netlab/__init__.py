"""Hosts that one machine emulates, with slow links between them, and what is measured over them."""
