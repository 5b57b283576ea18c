# Values whose form the provider checks or that the stacks decode. Terraform makes up all others. Both stacks' tests link here.

mock_data "aws_caller_identity" {
  defaults = { account_id = "111122223333", arn = "arn:aws:sts::111122223333:assumed-role/platform/you" }
}

mock_data "aws_partition" {
  defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
}

mock_data "aws_ami" {
  defaults = {
    id          = "ami-0123456789abcdef0"
    name        = "al2023-ami-ecs-neuron-hvm-2023.0.20260506-kernel-6.1-x86_64"
    description = "EKS-optimized Kubernetes node based on Amazon Linux 2023, (k8s: 1.35.4, containerd: 2.2.*)"
  }
}

mock_data "aws_subnet" {
  defaults = { id = "subnet-0fedcba9876543210", vpc_id = "vpc-given", cidr_block = "10.0.0.0/20", availability_zone_id = "usw2-az4", map_public_ip_on_launch = false }
}

mock_data "aws_ami_ids" {
  defaults = { ids = ["ami-0123456789abcdef0"] }
}

mock_data "aws_ec2_instance_type_offerings" {
  defaults = { instance_types = ["trn1.32xlarge", "trn1n.32xlarge", "trn2.3xlarge", "trn2.48xlarge", "trn2u.48xlarge", "m7i.2xlarge", "m7i.4xlarge", "m7i.8xlarge", "m7i.16xlarge"] }
}

mock_data "aws_iam_session_context" {
  defaults = { issuer_arn = "arn:aws:iam::111122223333:role/platform" }
}

mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555" }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::111122223333:role/mock" }
}

mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::111122223333:instance-profile/mock" }
}

mock_resource "aws_iam_policy" {
  defaults = { arn = "arn:aws:iam::111122223333:policy/mock" }
}

mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:us-west-2:111122223333:log-group:mock" }
}

mock_resource "aws_s3_bucket" {
  defaults = { id = "mock-bucket", arn = "arn:aws:s3:::mock-bucket" }
}

mock_resource "aws_cloudwatch_event_rule" {
  defaults = { arn = "arn:aws:events:us-west-2:111122223333:rule/mock" }
}

mock_resource "aws_sns_topic" {
  defaults = { arn = "arn:aws:sns:us-west-2:111122223333:mock" }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}

mock_resource "aws_fsx_lustre_file_system" {
  defaults = {
    id         = "fs-0123456789abcdef0"
    dns_name   = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"
    mount_name = "mockmnt"
  }
}

mock_resource "aws_batch_compute_environment" {
  defaults = { arn = "arn:aws:batch:us-west-2:111122223333:compute-environment/mock" }
}

mock_resource "aws_subnet" {
  defaults = { id = "subnet-0123456789abcdef0" }
}

mock_resource "aws_eks_node_group" {
  defaults = { resources = [{ autoscaling_groups = [{ name = "eks-trainium-mock" }], remote_access_security_group_id = "" }] }
}
