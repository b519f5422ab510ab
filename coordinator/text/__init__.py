"""One text: what is committed, what that cost, and its tokens on the way to whoever asked."""
