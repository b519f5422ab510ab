"""The three pure machines, joined by bad links, in seeded virtual time."""
