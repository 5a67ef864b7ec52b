"""What every test shares: hypothesis does not time examples on a machine that others use."""

import hypothesis

hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")
