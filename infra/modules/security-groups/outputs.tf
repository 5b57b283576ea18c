output "efa_id" {
  value = aws_security_group.efa.id
}

output "fsx_id" {
  value = aws_security_group.fsx.id
}
