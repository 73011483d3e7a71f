"""Folders on a disk or in a bucket, and their content: small documents and parquet files."""
