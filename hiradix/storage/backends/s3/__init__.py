"""The `s3` backend: one object per page in S3, Google Cloud Storage or Azure."""
