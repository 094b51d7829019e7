"""Certificates: lower bounds that hold for every order of a step's work, in a form that a small program can check."""
