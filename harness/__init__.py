"""The harness: replay a trace against an engine, measure, store, report."""
