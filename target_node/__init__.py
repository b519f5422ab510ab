"""The target's process: verifies drafts with the target model; never sees the drafter's model."""
