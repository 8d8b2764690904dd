"""Policy and critic: loaded, adapted, compiled, and what they compute of a pack. No optimizer and no loss of the
policy; which models a run needs is said in `roles`."""
