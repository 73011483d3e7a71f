"""DataFrame in, DataFrame out: no session, no read, no write."""
