"""How live windows become final: plan, recompute, audit, publish, account."""
