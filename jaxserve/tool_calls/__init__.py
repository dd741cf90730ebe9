"""Tool calls: how models write them, read while they are being written. Plain Python; nothing of HTTP."""
