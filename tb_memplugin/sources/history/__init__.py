"""The allocator's own history, recorded beside a profiled window and joined with it."""
