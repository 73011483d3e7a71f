"""A folder on a disk or in a bucket, and what lies in it: small documents, parquet files."""
