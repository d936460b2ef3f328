"""Builds a report: one HTML page on a run and a step of it that needs no server and no network."""
