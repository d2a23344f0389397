"""Record the allocator's own history during a profiled window, and merge it with the profile."""
