"""Files and batches over HTTP: `/v1/files`, `/v1/batches`; kept on disk, so that a restart resumes them."""
