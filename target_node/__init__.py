"""The target's process: verifies drafts with the target model. A drafter at home runs here, too."""
