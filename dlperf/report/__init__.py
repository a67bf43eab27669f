"""Renders predictions, measurements and reports: text, Markdown, CSV, JSON, HTML, plots."""
