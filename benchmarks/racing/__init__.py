"""Race the workers at their own pace against synchronous training: to the same accuracy, on the same data."""
