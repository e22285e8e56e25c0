"""What a session may have, and may do: variables, credentials, privilege, dangerous commands."""
