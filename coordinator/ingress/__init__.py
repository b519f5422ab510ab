"""In front of several servers: sends each request to one, and moves texts when a server is lost."""
