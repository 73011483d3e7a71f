"""The sources and pipelines that come with the platform: one file for all sources, one for each pipeline."""
