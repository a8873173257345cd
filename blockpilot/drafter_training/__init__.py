"""A drafter of one's own: texts of the target, the DFlash objective, and what held-out texts say of the result."""
