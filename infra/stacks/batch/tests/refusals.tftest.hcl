# Values that would fail on AWS an hour later, or cost money and compute nothing, are refused before anything is planned. The EKS
# stack's refusals.tftest.hcl tests common.tf, which both stacks share.

mock_provider "aws" {
  source = "../mocks"
}

variables {
  region  = "us-west-2"
  zone_id = "usw2-az4"
}

run "more_nodes_than_the_subnet_has_addresses" {
  command = plan
  variables {
    network  = { cidr = "10.9.0.0/22" }
    trainium = { max_nodes = 14 }
  }
  expect_failures = [var.trainium]
}

run "values_that_aws_does_not_take" {
  command = plan
  variables {
    ami_id              = "al2023"
    hugging_face_secret = "hf_abc"
    webhook_secret      = "https://hooks.example.com/services/T0/B0/abc"
    checkpoint_gb       = 0
    queue_limits        = { capacity_seconds = 60 }
  }
  expect_failures = [var.ami_id, var.hugging_face_secret, var.webhook_secret, var.checkpoint_gb, var.queue_limits]
}

run "values_that_make_no_sense" {
  command = plan
  variables {
    hugging_face_secret = "arn:aws:secretsmanager:us-east-1:111122223333:secret:hugging-face"
    queue_limits        = { misconfiguration_seconds = 100000 }
  }
  expect_failures = [var.hugging_face_secret, var.queue_limits]
}

run "a_config_that_is_not_there" {
  command = plan
  variables {
    config = "tests/configs/nowhere.txt"
  }
  expect_failures = [var.config]
}

run "a_config_of_another_region" {
  command = plan
  variables {
    config = "tests/configs/other-region.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_file_system_without_its_mount_name" {
  command = plan
  variables {
    config = "tests/configs/half-a-file-system.txt"
  }
  expect_failures = [terraform_data.given]
}

run "groups_of_an_unknown_vpc" {
  command = plan
  variables {
    config = "tests/configs/groups-without-subnet.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_file_system_that_lets_no_node_in" {
  command = plan
  variables {
    config = "tests/configs/file-system-without-groups.txt"
  }
  expect_failures = [terraform_data.given]
}

run "blanks_between_ids" {
  command = plan
  variables {
    config = "tests/configs/blanks.txt"
  }
  expect_failures = [terraform_data.given]
}

run "an_image_for_a_repository" {
  command = plan
  variables {
    config = "tests/configs/an-image.txt"
  }
  expect_failures = [terraform_data.given]
}

run "two_subnets" {
  command = plan
  variables {
    config = "tests/configs/two-subnets.txt"
  }
  expect_failures = [terraform_data.given]
}

run "the_config_that_the_stack_itself_wrote" {
  command = plan
  variables {
    config = "tests/configs/of-this-stack.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_subnet_of_another_zone" {
  command = plan
  variables {
    zone_id = "usw2-az1"
    config  = "tests/configs/subnet.txt"
  }
  expect_failures = [data.aws_subnet.given]
}

run "an_ami_whose_driver_nobody_knows" {
  command = plan
  variables {
    ami_id = "ami-0fedcba9876543210"
  }
  override_data {
    target = data.aws_ami.trainium
    values = { id = "ami-0fedcba9876543210", name = "al2023-ami-ecs-neuron-hvm-2023.0.20260820-kernel-6.1-x86_64" }
  }
  expect_failures = [data.aws_ami.trainium]
}

run "a_public_subnet" {
  command = plan
  variables {
    config = "tests/configs/subnet.txt"
  }
  override_data {
    target = data.aws_subnet.given[0]
    values = { id = "subnet-0fedcba9876543210", vpc_id = "vpc-given", availability_zone_id = "usw2-az4", map_public_ip_on_launch = true, cidr_block = "10.0.0.0/20" }
  }
  expect_failures = [data.aws_subnet.given]
}

run "a_subnet_that_is_too_small" {
  command = plan
  variables {
    config   = "tests/configs/subnet.txt"
    trainium = { max_nodes = 7 }
  }
  override_data {
    target = data.aws_subnet.given[0]
    values = { id = "subnet-0fedcba9876543210", vpc_id = "vpc-given", availability_zone_id = "usw2-az4", map_public_ip_on_launch = false, cidr_block = "10.0.0.0/26" }
  }
  expect_failures = [data.aws_subnet.given]
}

run "a_role_that_is_no_instance_profile" {
  command = plan
  variables {
    config = "tests/configs/a-role.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_config_with_quotes" {
  command = plan
  variables {
    config = "tests/configs/quotes.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_run_with_a_name_that_no_run_has" {
  command = plan
  variables {
    run = "Llama 2"
  }
  expect_failures = [var.run]
}
