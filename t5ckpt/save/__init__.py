"""Saves: the request, its checks, and the stages that carry it out."""
