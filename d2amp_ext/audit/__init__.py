"""The room of the audit: what a precision changes on a user's own model and data, where, and what mends it."""
