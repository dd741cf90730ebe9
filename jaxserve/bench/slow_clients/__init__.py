"""Many clients that read slowly, or not at all, or go away: what they cost the others, and the server."""
