"""The sources and pipelines that come with the platform: one file each."""
